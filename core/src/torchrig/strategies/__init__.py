"""The built-in strategies, written and published as a third party's would be."""
