"""`rdt doctor`: what is wrong with a node or a cluster before a sync finds out, what it costs, and what mends it.

Facts are collected (`collect`), judged by pure functions (`checks`, `devicechecks`), and real transfers are measured between
fresh processes (`measure`, `probe`) and judged against one copy of the same bytes (`judge`); `run` puts them together.
Nothing is changed on any machine. Imports nothing by itself, so that the command line stays quick.
"""
