"""What every part of the solver reads: costs, schedules and their bytes, exact."""
