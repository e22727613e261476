"""What an adapter is: its files read, its config checked, compiled to one intermediate form. NumPy, no torch."""
