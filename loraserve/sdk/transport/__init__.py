"""HTTP calls with retries, blocking and asynchronous; streaming and paging."""
