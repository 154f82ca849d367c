"""Triton skeletons: the chunkwise matrix families and their adjoints. Imported only when a GPU backend is asked for."""
