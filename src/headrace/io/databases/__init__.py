"""Tables in databases, data lakes and vector stores: plugins that nothing else in Headrace names."""
