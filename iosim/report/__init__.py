"""What people see: tables for a terminal, Markdown, CSV, figures, and files written whole."""
