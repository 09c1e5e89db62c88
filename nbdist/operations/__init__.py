"""Requests that all ranks carry out together: switch, resize, load, export, import, calibrate.

The notebook's side; `nbdist.worker.operations` has the ranks' side.
"""
