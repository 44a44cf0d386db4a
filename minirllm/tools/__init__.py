"""What reads a run folder and says what is in it: one file for each verb of the command line (`show`).

Nothing in here is needed to make a run. Owns: no code of its own. Does not know: each other.
"""
