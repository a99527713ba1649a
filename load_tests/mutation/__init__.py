"""Do the tests notice? Small semantic changes of the code, each with the tests that mirror its file: `python -m load_tests.mutation`.

The changes were chosen by reading the code, before its tests. One that survives wants a test.
"""
