"""What reads a run folder and says what is in it: one file for each verb of the command line, and what they share.

`show` prints a run, `ledger` its tokens, `diff` says where two runs part, `replay` computes a run again, `programs` are
the harnesses, `harness` checks one; `runs` is what a folder holds.
Nothing in here is needed to make a run. Owns: no code of its own. Does not know: how runs are made.
"""
