"""What people see: violations and, later, tables and Gantt charts. Only `cli` and this package print."""
