"""JavaScript halves of workerd's tests, written in Python.

Each is named like the folder of its test, and does what the test's JavaScript does, with the same arguments and checks.
"""
