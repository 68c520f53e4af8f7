"""Event listeners: accounts, reports, live views and exporters."""
