"""Commands on adapters, their versions and their aliases."""
