"""Types that the client takes and returns."""
