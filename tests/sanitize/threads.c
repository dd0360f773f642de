/* Threads on one small table, for sanitizers: everything that writes or reads shared memory, all at once.  Includes the
 * helper, so that it is compiled as it stands.
 *
 *   threads SECONDS   ends with 1 where a key was allowed more than its limit
 *
 * NOTE: ThreadSanitizer replaces the 16-byte swap by one under its own lock.  That is seen as the atomic operation that it
 * is, but the two halves are written one after the other, so that a look may find a pair that never was: such an answer
 * (CORRUPT, or a denial) is no failure here.  What was swapped in is always right, so nobody is allowed too much.
 */
#include "_table.c" /* the first, since it says which functions the system headers declare */

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

enum { THREADS = 4, SLOTS = 24, SPARE_SLOTS = 1024, LONG = 6, SHORT = 60, LIMIT = 200 };

static struct table table;
static struct policy day, hour, churn[3];  /* exact limits; and policies whose states expire at once */
static atomic_int allowed[LONG], stop;
static atomic_long statuses[8];

static void prepare(struct policy *p, int64_t kind, int64_t quota, int64_t period_us, const char *identity) {
    *p = (struct policy){.table = &table, .kind = kind, .quota = quota, .period_us = period_us, .denominator = 1};
    p->interval = kind == GCRA ? period_us / quota : 1;
    p->tolerance = kind == GCRA ? period_us : 1;
    shmlimit_subkey(p, (const unsigned char *)identity, (int)strlen(identity));
}

static int answer(int status) {
    atomic_fetch_add(&statuses[status + 4], 1);
    return status;
}

/* Hits on keys that last: takes on the even ones, on the odd ones charges, of which half are given back. */
static void take_lasting(unsigned n) {
    unsigned k = n % LONG;
    unsigned char key[2] = {'k', (unsigned char)('a' + k)};
    const struct policy *p = k & 2 ? &day : &hour;
    struct call call = {.policy = p, .now_us = -1};
    if (k % 2 == 0) {
        if (answer(shmlimit_take(&call, key, 2, 1)) >= 0 && call.allowed)
            atomic_fetch_add(&allowed[k], 1);
        return;
    }
    if (answer(shmlimit_charge(&call, key, 2, 1)) < 0 || !call.allowed)
        return;
    if (n / LONG % 2) {
        atomic_fetch_add(&allowed[k], 1);
        shmlimit_count(&table, 1, 0, call.shared, 0);
    } else {
        answer(shmlimit_give_back(&call, key, 2, 1));
    }
}

/* Anything, on more keys than there are slots, which expire, are reset and come back all the time. */
static void churn_on(unsigned n) {
    unsigned char key[9] = {'s', (unsigned char)(n % SHORT), 's', 'h', 'o', 'r', 't', '-', '-'};
    struct call call = {.policy = &churn[n % 3], .now_us = -1};
    int length = 2 + (int)(n % 8);
    switch (n / 7 % 8) {
    case 0: answer(shmlimit_peek(&call, key, length, 1)); break;
    case 1: answer(shmlimit_reset(&call, key, length)); break;
    case 2: shmlimit_count_live(table.keys.slots, SLOTS, shmlimit_now_us(&table)); break;
    case 3:
        if (answer(shmlimit_charge(&call, key, length, 1)) >= 0 && call.allowed)
            answer(shmlimit_give_back(&call, key, length, 1));
        break;
    default: answer(shmlimit_take(&call, key, length, (int)(n % 3)));
    }
}

static void *work(void *argument) {
    unsigned n = (unsigned)(uintptr_t)argument * 2654435761u + 1;
    while (!atomic_load(&stop)) {
        n = n * 1664525u + 1013904223u;
        if (n >> 31)
            take_lasting(n >> 8);
        else
            churn_on(n >> 8);
    }
    return NULL;
}

int main(int argc, char **argv) {
    /* From the heap and no longer than needed: whoever looks beyond it is caught. */
    size_t size = sizeof(struct header) + sizeof(struct slot) * (SLOTS + SPARE_SLOTS);
    void *memory;
    if (posix_memalign(&memory, 4096, size) != 0)
        return 2;
    table.header = memset(memory, 0, size);
    table.header->secret[0] = 1, table.header->slots = SLOTS, table.header->spare_slots = SPARE_SLOTS;
    table.header->clock_offset_us = shmlimit_clock_offset_us();
    table.keys = (struct region){(struct slot *)(table.header + 1), SLOTS / BUCKET};
    table.spare = (struct region){table.keys.slots + SLOTS, SPARE_SLOTS / BUCKET};
    shmlimit_choose_lane(&table, getpid());
    prepare(&day, FIXED, LIMIT, INT64_C(366) * 86400000000, "day");
    prepare(&hour, GCRA, LIMIT, INT64_C(366) * 86400000000, "hour");
    prepare(&churn[0], GCRA, 2, 200, "bucket");
    prepare(&churn[1], FIXED, 2, 1000, "window");
    prepare(&churn[2], SLIDING, 2, 1000, "sliding");
    pthread_t threads[THREADS];
    for (int i = 0; i < THREADS; i++)
        pthread_create(&threads[i], NULL, work, (void *)(uintptr_t)(i + 1));
    struct timespec pause = {argc > 1 ? atoi(argv[1]) : 1, 0};
    nanosleep(&pause, NULL);
    atomic_store(&stop, 1);
    for (int i = 0; i < THREADS; i++)
        pthread_join(threads[i], NULL);
    int too_many = 0;
    for (int k = 0; k < LONG; k++)
        too_many += allowed[k] > LIMIT;
    const struct lane *lane = table.lane;
    printf("{\"too_many\": %d, \"allowed\": [", too_many);
    for (int k = 0; k < LONG; k++)
        printf("%d%s", allowed[k], k + 1 < LONG ? ", " : "], ");
    printf("\"full\": %llu, \"shared\": %llu, \"reclaimed\": %llu, \"contended\": %llu, \"lost\": %ld, \"calls\": %ld}\n",
           (unsigned long long)lane->full, (unsigned long long)lane->shared, (unsigned long long)lane->reclaimed,
           (unsigned long long)lane->contended, statuses[CONTENDED + 4], statuses[ANSWERED + 4] + statuses[CROWDED + 4]);
    free(table.header);
    return too_many != 0;
}
