"""A checker that shares no code with the library: `check.py` needs Python and NumPy alone."""
