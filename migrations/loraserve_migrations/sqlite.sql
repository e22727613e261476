CREATE TABLE "adapter_versions" (
    id VARCHAR(26) NOT NULL,
    adapter_id VARCHAR(26) NOT NULL,
    number INTEGER NOT NULL,
    digest VARCHAR(64) NOT NULL,
    config_blob VARCHAR(64) NOT NULL,
    weights_blob VARCHAR(64) NOT NULL,
    base_digest VARCHAR(64) NOT NULL,
    size_bytes BIGINT NOT NULL,
    rank INTEGER NOT NULL,
    target_modules JSON NOT NULL,
    dtype VARCHAR(16) NOT NULL,
    state VARCHAR(16) NOT NULL,
    checks JSON NOT NULL,
    created_at DATETIME NOT NULL,
    created_by VARCHAR(128) NOT NULL,
    deleted_at DATETIME,
    notes TEXT DEFAULT '' NOT NULL,
    tags JSON DEFAULT '{}' NOT NULL,
    CONSTRAINT ck_adapter_versions_ck_adapter_versions_number_positive CHECK (number >= 1),
    CONSTRAINT fk_adapter_versions_adapter_id FOREIGN KEY(adapter_id) REFERENCES adapters (id),
    CONSTRAINT pk_adapter_versions PRIMARY KEY (id),
    CONSTRAINT uq_adapter_versions_adapter_id_number UNIQUE (adapter_id, number)
);
CREATE TABLE "adapters" (
    id VARCHAR(26) NOT NULL,
    tenant_id VARCHAR(26) NOT NULL,
    name VARCHAR(63) NOT NULL,
    last_version INTEGER NOT NULL,
    revision INTEGER NOT NULL,
    created_at DATETIME NOT NULL,
    updated_at DATETIME NOT NULL,
    deleted_at DATETIME,
    notes TEXT DEFAULT '' NOT NULL,
    tags JSON DEFAULT '{}' NOT NULL,
    fallback VARCHAR(63),
    CONSTRAINT fk_adapters_tenant_id FOREIGN KEY(tenant_id) REFERENCES tenants (id),
    CONSTRAINT pk_adapters PRIMARY KEY (id),
    CONSTRAINT uq_adapters_tenant_id_name UNIQUE (tenant_id, name)
);
CREATE TABLE alembic_version (
    version_num VARCHAR(32) NOT NULL,
    CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num)
);
CREATE TABLE aliases (
    adapter_id VARCHAR(26) NOT NULL,
    name VARCHAR(63) NOT NULL,
    version INTEGER NOT NULL,
    revision INTEGER NOT NULL,
    updated_at DATETIME NOT NULL, split JSON, shadow JSON, previous JSON,
    CONSTRAINT fk_aliases_adapter_id FOREIGN KEY(adapter_id) REFERENCES adapters (id),
    CONSTRAINT fk_aliases_adapter_id_version FOREIGN KEY(adapter_id, version) REFERENCES adapter_versions (adapter_id, number),
    CONSTRAINT pk_aliases PRIMARY KEY (adapter_id, name)
);
CREATE TABLE api_keys (
    id VARCHAR(26) NOT NULL,
    tenant_id VARCHAR(26),
    name VARCHAR(128) NOT NULL,
    scopes JSON NOT NULL,
    prefix VARCHAR(16) NOT NULL,
    secret_hash VARCHAR(64) NOT NULL,
    created_at DATETIME NOT NULL,
    expires_at DATETIME,
    revoked_at DATETIME,
    CONSTRAINT fk_api_keys_tenant_id FOREIGN KEY(tenant_id) REFERENCES tenants (id),
    CONSTRAINT pk_api_keys PRIMARY KEY (id),
    CONSTRAINT uq_api_keys_secret_hash UNIQUE (secret_hash)
);
CREATE TABLE audit (
    id INTEGER NOT NULL,
    at DATETIME NOT NULL,
    tenant_id VARCHAR(26),
    actor VARCHAR(128) NOT NULL,
    action VARCHAR(63) NOT NULL,
    target VARCHAR(255) NOT NULL,
    detail JSON NOT NULL,
    CONSTRAINT fk_audit_tenant_id FOREIGN KEY(tenant_id) REFERENCES tenants (id),
    CONSTRAINT pk_audit PRIMARY KEY (id)
);
CREATE TABLE doomed_blobs (
    digest VARCHAR(64) NOT NULL,
    doomed_at DATETIME NOT NULL, deleting_at DATETIME,
    CONSTRAINT pk_doomed_blobs PRIMARY KEY (digest)
);
CREATE TABLE grants (
    adapter_id VARCHAR(26) NOT NULL,
    tenant_id VARCHAR(26) NOT NULL,
    created_at DATETIME NOT NULL,
    created_by VARCHAR(128) NOT NULL,
    CONSTRAINT fk_grants_adapter_id FOREIGN KEY(adapter_id) REFERENCES adapters (id),
    CONSTRAINT fk_grants_tenant_id FOREIGN KEY(tenant_id) REFERENCES tenants (id),
    CONSTRAINT pk_grants PRIMARY KEY (adapter_id, tenant_id)
);
CREATE TABLE idempotency_keys (
    owner VARCHAR(128) NOT NULL,
    key_hash VARCHAR(64) NOT NULL,
    fingerprint VARCHAR(64) NOT NULL,
    status INTEGER NOT NULL,
    headers JSON NOT NULL,
    body BLOB NOT NULL,
    created_at DATETIME NOT NULL,
    expires_at DATETIME NOT NULL,
    CONSTRAINT pk_idempotency_keys PRIMARY KEY (owner, key_hash)
);
CREATE TABLE leases (
    name VARCHAR(63) NOT NULL,
    holder VARCHAR(26) NOT NULL,
    expires_at DATETIME NOT NULL,
    CONSTRAINT pk_leases PRIMARY KEY (name)
);
CREATE TABLE operations (
    id VARCHAR(26) NOT NULL,
    tenant_id VARCHAR(26) NOT NULL,
    kind VARCHAR(63) NOT NULL,
    target VARCHAR(255) NOT NULL,
    state VARCHAR(16) NOT NULL,
    is_cancelling BOOLEAN NOT NULL,
    progress JSON NOT NULL,
    result JSON,
    error JSON,
    actor VARCHAR(128) NOT NULL,
    created_at DATETIME NOT NULL,
    updated_at DATETIME NOT NULL,
    CONSTRAINT fk_operations_tenant_id FOREIGN KEY(tenant_id) REFERENCES tenants (id),
    CONSTRAINT pk_operations PRIMARY KEY (id)
);
CREATE TABLE operator_pins (
    adapter_id VARCHAR(26) NOT NULL,
    version INTEGER NOT NULL,
    created_at DATETIME NOT NULL,
    created_by VARCHAR(128) NOT NULL,
    CONSTRAINT fk_operator_pins_adapter_id FOREIGN KEY(adapter_id) REFERENCES adapters (id),
    CONSTRAINT fk_operator_pins_adapter_id_version FOREIGN KEY(adapter_id, version) REFERENCES adapter_versions (adapter_id, number),
    CONSTRAINT pk_operator_pins PRIMARY KEY (adapter_id, version)
);
CREATE TABLE registry_identity (
    slot INTEGER NOT NULL,
    id VARCHAR(26) NOT NULL,
    made_at DATETIME NOT NULL,
    CONSTRAINT pk_registry_identity PRIMARY KEY (slot)
);
CREATE TABLE server_secrets (
    name VARCHAR(63) NOT NULL,
    value BLOB NOT NULL,
    created_at DATETIME NOT NULL,
    CONSTRAINT pk_server_secrets PRIMARY KEY (name)
);
CREATE TABLE servers (
    id VARCHAR(26) NOT NULL,
    num_beats BIGINT NOT NULL,
    started_at DATETIME NOT NULL,
    CONSTRAINT pk_servers PRIMARY KEY (id)
);
CREATE TABLE shadow_hours (
    adapter_id VARCHAR(26) NOT NULL,
    alias VARCHAR(63) NOT NULL,
    hour DATETIME NOT NULL,
    version INTEGER NOT NULL,
    shadow_version INTEGER NOT NULL,
    num_requests BIGINT NOT NULL,
    num_failed BIGINT NOT NULL,
    num_equal BIGINT NOT NULL,
    num_tokens BIGINT NOT NULL,
    num_agreed_tokens BIGINT NOT NULL,
    live_ms BIGINT NOT NULL,
    shadow_ms BIGINT NOT NULL,
    CONSTRAINT fk_shadow_hours_adapter_id FOREIGN KEY(adapter_id) REFERENCES adapters (id),
    CONSTRAINT pk_shadow_hours PRIMARY KEY (adapter_id, alias, hour, version, shadow_version)
);
CREATE TABLE store_stamps (
    id VARCHAR(26) NOT NULL,
    made_at DATETIME NOT NULL,
    written_at DATETIME,
    CONSTRAINT pk_store_stamps PRIMARY KEY (id)
);
CREATE TABLE tenants (
    id VARCHAR(26) NOT NULL,
    name VARCHAR(63) NOT NULL,
    limits JSON NOT NULL,
    created_at DATETIME NOT NULL,
    deleted_at DATETIME, weight FLOAT DEFAULT '1' NOT NULL, prices JSON DEFAULT '{}' NOT NULL,
    CONSTRAINT pk_tenants PRIMARY KEY (id)
);
CREATE TABLE upload_chunks (
    upload_id VARCHAR(26) NOT NULL,
    start BIGINT NOT NULL,
    size BIGINT NOT NULL,
    digest VARCHAR(64) NOT NULL,
    CONSTRAINT fk_upload_chunks_upload_id FOREIGN KEY(upload_id) REFERENCES uploads (id),
    CONSTRAINT pk_upload_chunks PRIMARY KEY (upload_id, start)
);
CREATE TABLE uploads (
    id VARCHAR(26) NOT NULL,
    tenant_id VARCHAR(26) NOT NULL,
    sha256 VARCHAR(64) NOT NULL,
    size BIGINT NOT NULL,
    received BIGINT NOT NULL,
    is_complete BOOLEAN NOT NULL,
    created_at DATETIME NOT NULL,
    expires_at DATETIME NOT NULL,
    CONSTRAINT fk_uploads_tenant_id FOREIGN KEY(tenant_id) REFERENCES tenants (id),
    CONSTRAINT pk_uploads PRIMARY KEY (id)
);
CREATE TABLE usage_hours (
    tenant_id VARCHAR(26) NOT NULL,
    hour DATETIME NOT NULL,
    owner VARCHAR(26) DEFAULT '' NOT NULL,
    adapter VARCHAR(255) NOT NULL,
    version INTEGER NOT NULL,
    price VARCHAR(64) DEFAULT '' NOT NULL,
    num_requests BIGINT NOT NULL,
    prompt_tokens BIGINT NOT NULL,
    cached_tokens BIGINT NOT NULL,
    completion_tokens BIGINT NOT NULL,
    undelivered_tokens BIGINT NOT NULL,
    CONSTRAINT fk_usage_hours_tenant_id FOREIGN KEY(tenant_id) REFERENCES tenants (id),
    CONSTRAINT pk_usage_hours PRIMARY KEY (tenant_id, hour, owner, adapter, version, price)
);
CREATE TABLE usage_journals (
    id VARCHAR(26) NOT NULL,
    sequence BIGINT NOT NULL,
    updated_at DATETIME NOT NULL,
    CONSTRAINT pk_usage_journals PRIMARY KEY (id)
);
CREATE INDEX ix_adapter_versions_digest ON adapter_versions (digest);
CREATE INDEX ix_aliases_adapter_id_version ON aliases (adapter_id, version);
CREATE INDEX ix_api_keys_tenant_id_id ON api_keys (tenant_id, id);
CREATE INDEX ix_audit_tenant_id_id ON audit (tenant_id, id);
CREATE INDEX ix_grants_tenant_id ON grants (tenant_id);
CREATE INDEX ix_idempotency_keys_expires_at ON idempotency_keys (expires_at);
CREATE INDEX ix_idempotency_keys_owner_created_at ON idempotency_keys (owner, created_at);
CREATE INDEX ix_operations_tenant_id_id ON operations (tenant_id, id);
CREATE INDEX ix_shadow_hours_hour ON shadow_hours (hour);
CREATE INDEX ix_upload_chunks_digest ON upload_chunks (digest);
CREATE INDEX ix_uploads_expires_at ON uploads (expires_at);
CREATE INDEX ix_uploads_tenant_id_id ON uploads (tenant_id, id);
CREATE INDEX ix_usage_hours_hour ON usage_hours (hour);
CREATE UNIQUE INDEX uq_adapter_versions_adapter_id_digest ON adapter_versions (adapter_id, digest) WHERE deleted_at IS NULL;
CREATE UNIQUE INDEX uq_tenants_name ON tenants (name) WHERE deleted_at IS NULL;
INSERT INTO alembic_version (version_num) VALUES ('0004');
