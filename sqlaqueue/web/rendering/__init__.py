"""From values to HTML: the templates, their filters and the charts."""
