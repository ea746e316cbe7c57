"""Steps eager and compiled: predicted before anybody measured them, and measured."""
