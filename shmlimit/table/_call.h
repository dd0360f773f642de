/* What both sides of a call know: what the Python side prepares, in its own memory, and what a call returns. */
#ifndef SHMLIMIT_CALL_H
#define SHMLIMIT_CALL_H
#include <stdint.h>

enum { ABI = 4 };                          /* of all that is told here, and of what _table.c exports; also in native.py */

struct region {                            /* slots in buckets */
    struct slot *slots;
    uint64_t buckets;
};

struct table {                             /* one per attached table */
    struct header *header;
    struct lane *lane;                     /* this process's; chosen again after a fork */
    struct region keys, spare;
};

struct policy {                            /* one per table and policy: all that is constant for it */
    struct table *table;
    uint64_t key[2];                       /* SipHash key of its fingerprints, from the secret and its identity */
    int64_t kind;                          /* of its state words: an index of FORMATS */
    int64_t quota;
    int64_t period_us;                     /* of a window */
    int64_t denominator;                   /* of a bucket: times are counted in 1/denominator microseconds: d */
    int64_t interval;                      /* emission interval T in 1/d us, rounded up where d is capped */
    int64_t tolerance;                     /* quota * interval */
};

struct call {                              /* one per call under way; never shared between two threads */
    const struct policy *policy;
    int64_t now_us;                        /* the caller's time, or -1: the table's clock */
    uint8_t allowed;                       /* from here on: the answer, in the order of Decision ... */
    uint8_t shared;                        /* it was decided over the state of a spare slot */
    uint8_t full;                          /* the key found no room, not even a spare slot */
    uint8_t in_spare;                      /* the charge is in a spare slot */
    int64_t limit, remaining, reset_us, retry_after_us, next_us; /* ... to here */
    uint64_t before, charged;              /* of a charge, for giving it back: the word that it found (0: a fresh state)
                                              and the one that it wrote (0: none) */
    int64_t tries;                         /* how often it may still look */
};

/* What a judgement and a call return: bits, NEVER for an answer without a wait, CROWDED for one that says the table is too
 * small; the answer is in `struct call`.  Below 0 there is none.  AGAIN (the slot changed under the hands) and NO_ROOM
 * stay inside. */
enum { ANSWERED = 0, NEVER = 1, CROWDED = 2, CONTENDED = -1, CORRUPT = -2, AGAIN = -3, NO_ROOM = -4 };

#endif
