r"""Partitions in processes of their own, so that one that crashes, hangs or eats memory costs its round only.

The balancer's own process computes no plan. It hands rounds to worker processes by shared memory:

    balancer --- asks for workers ---> zygote --- forks ---> worker, worker, ...
        \______________ rounds and plans _______________________/

The *zygote* has imported and compiled everything and has one thread, which is what makes forking from it safe; a new
worker takes some milliseconds.
"""
