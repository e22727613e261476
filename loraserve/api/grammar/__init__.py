"""Check grammars of requests in processes of their own, before the engine sees them."""
