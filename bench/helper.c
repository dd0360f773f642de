/* The helper alone: a decision in C, beside what it is made of at least.  Built and run by helper.py, with the helper's own
 * sources. */
#define _GNU_SOURCE
#include "_table.c" /* the first, since it says which functions the system headers declare */

#include <stdio.h>
#include <stdlib.h>

enum { KEYS = 10000, KEY_BYTES = 16, SLOTS = 65536 };

static struct header *header;
static struct table table;
static struct policy open_policy, spent_policy;
static unsigned char keys[KEYS][KEY_BYTES];
static volatile uint64_t sink;

static void make_table(void) {
    size_t size = sizeof(struct header) + sizeof(struct slot) * (SLOTS + 1024);
    header = aligned_alloc(4096, (size + 4095) / 4096 * 4096);
    memset(header, 0, size);
    header->secret[0] = 1, header->secret[1] = 2;
    header->clock_offset_us = shmlimit_clock_offset_us();
    table.header = header;
    table.lane = header->lanes;
    table.keys = (struct region){(struct slot *)(header + 1), SLOTS / BUCKET};
    table.spare = (struct region){table.keys.slots + SLOTS, 1024 / BUCKET};
    /* A billion in ten days, and one in ten days. */
    open_policy = (struct policy){&table, {3, 4}, GCRA, 1000000000, 864000000000, 1, 864, 864000000000};
    spent_policy = (struct policy){&table, {5, 6}, GCRA, 1, 864000000000, 1, 864000000000, 864000000000};
    for (int i = 0; i < KEYS; i++)
        snprintf((char *)keys[i], KEY_BYTES, "10.0.%d.%d", i >> 8, i & 255);
}

/* One swap of a pair that nobody else wants, a hash of a key of 16 bytes, the clock: for each of the keys its own pair,
 * at the place that the hash says. */
static void floor_of_it(int n, int of) {
    for (int i = 0; i < n; i++) {
        uint64_t hash = siphash(open_policy.key, keys[i % of], KEY_BYTES);
        struct timespec now;
        clock_gettime(TABLE_CLOCK, &now);
        struct slot *slot = table.keys.slots + (hash & (SLOTS - 1));
        sink = (uint64_t)swap_pair(slot, slot->fingerprint, slot->state, slot->fingerprint, slot->state) + (uint64_t)now.tv_nsec;
    }
}

static void takes(struct policy *policy, int n, int of) {
    for (int i = 0; i < n; i++) {
        struct call call = {.policy = policy, .now_us = -1};
        shmlimit_take(&call, keys[i % of], KEY_BYTES, 1);
        sink = (uint64_t)call.remaining;
    }
}

static double measured(int which, int n, int of) {
    struct timespec begin, end;
    clock_gettime(CLOCK_MONOTONIC, &begin);
    if (which == 0)
        floor_of_it(n, of);
    else
        takes(which == 1 ? &open_policy : &spent_policy, n, of);
    clock_gettime(CLOCK_MONOTONIC, &end);
    return ((double)(end.tv_sec - begin.tv_sec) * 1e9 + (double)(end.tv_nsec - begin.tv_nsec)) / n;
}

/* `helper ROUNDS N`: each case N times a round, a line for each: keys, case, nanoseconds a call.  `helper CASE N KEYS`: one
 * case, for who counts instructions. */
int main(int argc, char **argv) {
    if (argc < 3)
        return 2;
    make_table();
    for (int of = 1; of <= KEYS; of += KEYS - 1) { /* every key is known, and spent */
        takes(&open_policy, KEYS, of);
        takes(&spent_policy, KEYS, of);
    }
    int n = atoi(argv[2]);
    if (argc == 4) {
        measured(atoi(argv[1]), n, atoi(argv[3]));
        return 0;
    }
    for (int round = 0; round < atoi(argv[1]); round++)
        for (int of = 1; of <= KEYS; of += KEYS - 1)
            for (int i = 0; i < 3; i++) {
                int which = (i + round) % 3;
                printf("%d %d %.2f\n", of, which, measured(which, n, of));
            }
    return 0;
}
