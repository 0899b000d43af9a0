"""When operations run again and how long storages are kept: retention intervals in CP-SAT."""
