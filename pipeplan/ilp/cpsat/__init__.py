"""The periodic scheduling model of CP-SAT at one period, and the search for the shortest."""
