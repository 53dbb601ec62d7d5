"""What must outlive a kill; decides nothing."""
