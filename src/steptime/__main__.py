"""`python -m steptime`: the command line."""

from steptime._cli import main

main()
