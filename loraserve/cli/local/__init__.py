"""Commands that work on this machine instead of calling a server: serve, plan, doctor,
db and demo.
"""
