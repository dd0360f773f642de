"""For tests of code that uses shmlimit, and of stores of one's own."""
