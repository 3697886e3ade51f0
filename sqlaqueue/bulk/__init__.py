"""How rows are streamed into the table of a queue by COPY: which columns, which values, by which driver."""
