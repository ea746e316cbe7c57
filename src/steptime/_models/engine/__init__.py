"""What every fitted model is made of: stored arrays, trees, small networks, and how far predictions were off.

This half answers and needs NumPy alone; `steptime_lab.fit.engine` has the half that fits.
"""
