"""What `torchshard doctor` looks at, a module for each subject.

Each gives findings: a fact in words, and where it is a fault, how to mend it. Whatever
imports torch or may hang runs in a process of its own, or in a thread, with a time limit.
"""
