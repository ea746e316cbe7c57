"""What ops are: the catalogue by name, the overloads by arguments, and one table of a program's ops that every model reads."""
