"""The database: tables, sessions, migrations, and what registry and tenancy share of them."""
