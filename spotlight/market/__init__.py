"""What GPUs cost, and when spot ones come and go; knows no run and no cluster."""
