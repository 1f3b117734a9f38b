# SPDX-License-Identifier: Apache-2.0
"""Programs that nobody trusts: run apart from everything, and held against tests that they cannot reach.

confine, seccomp     what a child takes away from itself before it reads a line of a program
files                which files a child may read
encoding             plain values as text, in and out of a program's process
child, checker       what runs in the two confined processes: the program answers calls, the checker makes them
remote               the program's things, as test code in the checker sees them
statements           what the text of tests says before they run: which names are classes, which tests cannot work
compare              when a returned value or a printed text is right
process              how the parent starts, watches and ends them
isolation            what this machine offers, tried out
suite, evalplus      the tests of a dataset's row
extract              the program in a completion

A program can read the standard library and the packages that its reward allows, and write small files in a folder of
its own. It makes no folders there, and what it deletes stays until the end. Where the machine allows user namespaces it
sees nothing else. Where it does not, Landlock still keeps it from the contents of all other files and folders, but not
from the knowledge that a file whose path it guesses exists, how long it is and when it changed, which packages are
installed, and which processes there are. bubblewrap also shows it the code of this folder, from which it starts.

Nothing is imported here: children import single files of this folder, and they start in milliseconds.
"""
