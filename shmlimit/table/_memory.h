/* Shared memory: its layout, and the only functions that touch it.  Included by _table.c alone. */
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

#if defined(__SIZEOF_INT128__) && (defined(__GCC_HAVE_SYNC_COMPARE_AND_SWAP_16) || defined(__aarch64__)) && \
    __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
#define HAVE_PAIR_CAS 1
#else
#define HAVE_PAIR_CAS 0
#endif

/* CLOCK_BOOTTIME counts while the machine sleeps, as people expect of a limit; both clocks are one for all processes. */
#ifdef CLOCK_BOOTTIME
#define TABLE_CLOCK CLOCK_BOOTTIME
#else
#define TABLE_CLOCK CLOCK_MONOTONIC
#endif

enum { BUCKET = 8, CANDIDATES = 3, LANES = 60 };
enum { TRIES = 10000 };                    /* lost swaps in one call; a test that gets near it has found a bug */

/* ---- the layout in shared memory (layout.py tells it; a test compares the two) ---------------------------------- */

struct slot {
    _Alignas(16) uint64_t fingerprint;     /* 0: empty */
    uint64_t state;                        /* self-describing: see expiry_us() */
};

struct lane {                              /* one process's counters; only added to, so sharing one loses nothing */
    _Alignas(128) uint64_t owner;          /* process id, 0: nobody's */
    uint64_t allowed, denied, shared, full, reclaimed, contended;
    uint64_t nonces;                       /* reservations made through this lane */
};

struct header {
    uint64_t magic;                        /* written last */
    uint32_t version, header_bytes;
    uint64_t slots, spare_slots;
    uint64_t secret[2];
    int64_t clock_offset_us;               /* table clock + this = Unix time */
    _Alignas(64) uint64_t watermark_us;    /* the latest expiry of anything that was forgotten */
    _Alignas(64) uint64_t spare_until_us;  /* spare slots are in use until then */
    _Alignas(512) struct lane lanes[LANES];
};

_Static_assert(sizeof(struct slot) == 16 && sizeof(struct lane) == 128, "sizes are part of the layout");
_Static_assert(offsetof(struct header, lanes) == 512 && sizeof(struct header) == 8192, "two pages");

/* ---- touching it ------------------------------------------------------------------------------------------------ */

/* Comes before each access to shared memory that others may change.  A test build puts a scheduler here. */
#ifndef YIELD
#define YIELD(word) ((void)(word))
#endif

/* Sequentially consistent, not just acquire: no look of a second scan may pass the swap that reserved.  Costs nothing on
 * x86-64, and on arm64 it is `ldar`, where acquire may be `ldapr`, which can pass a store. */
static inline uint64_t look(const uint64_t *word) {
    YIELD(word);
    return __atomic_load_n(word, __ATOMIC_SEQ_CST);
}

/* Gives what was there before. */
static inline uint64_t add(uint64_t *word, uint64_t n) {
    YIELD(word);
    return __atomic_fetch_add(word, n, __ATOMIC_RELAXED);
}

static inline int swap_word(uint64_t *word, uint64_t from, uint64_t to) {
    YIELD(word);
    return __sync_bool_compare_and_swap(word, from, to);
}

static inline int swap_pair(struct slot *slot, uint64_t fingerprint, uint64_t state, uint64_t to_fingerprint,
                            uint64_t to_state) {
    YIELD(&slot->fingerprint);
#if HAVE_PAIR_CAS
    typedef unsigned __int128 pair __attribute__((may_alias));
    pair from = (pair)state << 64 | fingerprint, to = (pair)to_state << 64 | to_fingerprint;
    return __sync_bool_compare_and_swap((pair *)slot, from, to);
#else
    (void)slot, (void)fingerprint, (void)state, (void)to_fingerprint, (void)to_state;
    return 0;
#endif
}

/* Raises a word to `value`.  0 when the bound on lost swaps was reached: then nothing may be built on it. */
static int raise_word(uint64_t *word, uint64_t value) {
    for (int i = 0; i < TRIES; i++) {
        uint64_t old = look(word);
        if (old >= value || swap_word(word, old, value))
            return 1;
    }
    return 0;
}

/* ---- hash and time ---------------------------------------------------------------------------------------------- */

static inline uint64_t rotl(uint64_t x, int b) { return x << b | x >> (64 - b); }

static inline void sip_rounds(uint64_t v[4], int n) {
    for (; n > 0; n--) {
        v[0] += v[1], v[1] = rotl(v[1], 13), v[1] ^= v[0], v[0] = rotl(v[0], 32);
        v[2] += v[3], v[3] = rotl(v[3], 16), v[3] ^= v[2];
        v[0] += v[3], v[3] = rotl(v[3], 21), v[3] ^= v[0];
        v[2] += v[1], v[1] = rotl(v[1], 17), v[1] ^= v[2], v[2] = rotl(v[2], 32);
    }
}

/* SipHash-2-4 (Aumasson and Bernstein, 2012): keyed, so nobody outside can make keys that collide. */
static uint64_t siphash(const uint64_t key[2], const unsigned char *data, size_t n) {
    uint64_t v[4] = {key[0] ^ UINT64_C(0x736f6d6570736575), key[1] ^ UINT64_C(0x646f72616e646f6d),
                     key[0] ^ UINT64_C(0x6c7967656e657261), key[1] ^ UINT64_C(0x7465646279746573)};
    uint64_t last = (uint64_t)n << 56, word;
    for (; n >= 8; n -= 8, data += 8) {
        memcpy(&word, data, 8);
        v[3] ^= word;
        sip_rounds(v, 2);
        v[0] ^= word;
    }
    for (size_t i = 0; i < n; i++)
        last |= (uint64_t)data[i] << (8 * i);
    v[3] ^= last;
    sip_rounds(v, 2);
    v[0] ^= last;
    v[2] ^= 0xff;
    sip_rounds(v, 4);
    return v[0] ^ v[1] ^ v[2] ^ v[3];
}

static int64_t clock_us(const struct header *header) {
    struct timespec t;
    clock_gettime(TABLE_CLOCK, &t);        /* unsigned: a spoilt offset may be anything */
    return (int64_t)((uint64_t)t.tv_sec * 1000000 + (uint64_t)t.tv_nsec / 1000 + (uint64_t)header->clock_offset_us);
}
