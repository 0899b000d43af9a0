"""What people see of a plan and of a run: text, tables, pictures. Formats only."""
