"""What runs inside Dask's scheduler: its events go to the dispatcher, and the dispatcher's instructions come back."""
