"""What is chosen: pure functions that know no clock, chance, file, torch or Dask."""
