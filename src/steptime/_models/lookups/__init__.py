"""Embedding lookups: how long a lookup of one or many tables takes, by what it looks up.

`question.Lookup` is one lookup with its tables' statistics; `question.Lookups` are many of them as columns, over a pool of
tables whose own part of the work is computed once, whatever the plan that places them. `forms` holds a model for each
implementation and direction, `steptime_lab.fit.lookups` makes them from measured rows, `fitted.LookupModels` asks them.
"""
