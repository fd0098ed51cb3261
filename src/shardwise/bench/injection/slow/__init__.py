"""Faults that tests and `bench truth` put on a worker's PYTHONPATH; never imported otherwise."""
