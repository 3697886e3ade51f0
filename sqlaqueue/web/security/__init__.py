"""What protects the dashboard: hosts, origins, response headers, forms and the audit."""
