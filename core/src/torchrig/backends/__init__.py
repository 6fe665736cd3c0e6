"""The built-in compile backends, written and published as a third party's would be."""
