"""Training on several devices at once. Nothing is imported here: `launch.py` is used before torch is."""
