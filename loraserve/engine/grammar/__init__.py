"""Constrain requests' tokens by grammars: matchers, masks of allowed tokens, and their threads."""
