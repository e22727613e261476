"""The async client, and the source of the blocking one: `_sync` is generated from these modules."""
