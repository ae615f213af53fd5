"""What people see: text, SVG and the HTML page. Only `cli` and this package print."""
