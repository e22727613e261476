"""Commands that work on this machine instead of calling a server.

They are serve, plan, doctor, db and demo.
"""
