/* How a key takes a slot of the shared table, as a model: a few slots, GCRA, a few takers of one request each.
 *
 *   spin -DP=1 -DTMAX=2 -DTORN -DK1=1 -DK2=1 -DK3=2 -a claim.pml
 *   cc -w -O2 -DSAFETY -DCOLLAPSE -DMEMLIM=4000 -o pan pan.c && ./pan -m100000
 *
 * README.md, beside this file, says what is modelled, what is left out and which configurations are run.
 *
 * A slot is the pair (fp, st).  st: 0 empty, 1 to 31 committed (it is the theoretical arrival time), from 32 on
 * reserved (it is the word of the reservation).  An atomic block touches shared memory once: one load, one swap or one
 * raising of the watermark.  All else in it is the taker's own, or the ghost's.
 *
 * ghost[k] is the arrival time of the bucket that key k truly has.  A request may only be allowed where this bucket
 * allows it: never more.
 *
 * A taker that is killed is one that is never scheduled again, and one that is stopped is scheduled late.  The search
 * contains all these runs: nothing here makes a taker go on.
 */
#ifndef NS
#define NS 2            /* slots */
#endif
#ifndef B
#define B 1             /* burst: what a fresh bucket allows at once */
#endif
#ifndef P
#define P 2             /* emission interval */
#endif
#ifndef TMAX
#define TMAX 3          /* clocks read 1 to TMAX, and may have been read long ago */
#endif
#ifndef RMAX
#define RMAX 2          /* reservations of one taker; then it gives up */
#endif
#ifndef K0
#define K0 3            /* the key in slot 0 at the start ... */
#endif
#ifndef X0
#define X0 2            /* ... and its word: an arrival time (9 never expires here), or 32: a dead taker's reservation */
#endif
#ifndef K1              /* the keys of the takers, 0: no such taker */
#define K1 1
#endif
#ifndef K2
#define K2 1
#endif
#ifndef K3
#define K3 0
#endif
#ifndef K4
#define K4 0
#endif
#ifndef R1
#define R1 0            /* the key of a reset, 0: none */
#endif
#ifndef REACH
#define REACH 0         /* the REACHED mark at which the search is to fail */
#endif

#define NONE 15
#define RESERVED(s) ((s) >= 32)
#define COMMITTED(s) ((s) > 0 && (s) < 32)
#define ALLOWS(tat, t) ((tat) <= (t) + (B - 1) * P)
#define MAX(a, b) ((a) > (b) -> (a) : (b))
#define SAME(x, f, s) (fp[x] == (f) && st[x] == (s))
#define REACHED(n) assert(REACH != n)
#define DENIES denies = denies || !ALLOWS(ghost[K], now)

#ifdef HALFCAS          /* ablation: a hit compares only the state */
#define SAME_HIT(x, f, s) (st[x] == (s))
#else
#define SAME_HIT(x, f, s) SAME(x, f, s)
#endif

#ifdef SAMEWORD         /* ablation: reservations of a key are all alike */
#define WORD 32
#else
#define WORD (32 + 4 * me + made_n)     /* from 33 on */
#endif
#ifdef TORN             /* others may run between the two loads of a pair */
#define THEN }; atomic {
#else
#define THEN
#endif

byte fp[NS], st[NS];
byte watermark;
byte ghost[4];
byte latest;            /* the latest that any clock read */
hidden byte j;          /* the ghost's, for loops */
#if REACH
bool committed[4];      /* a fresh state was committed for the key */
bool forgot[4];         /* a state of the key was forgotten */
#endif
#ifdef ALONE
byte alone;             /* if not 0: only this process runs */
#define IF_ALONE provided (alone == 0 || alone == _pid)
#else
#define IF_ALONE
#endif

/* The ghost's look at a request that a swap of slot x just allowed as of t. */
inline allowed(x, t) {
  assert(ALLOWS(ghost[K], t));                   /* never more */
  assert(t <= latest);
  ghost[K] = MAX(ghost[K], t) + P;
#ifndef ONLYMORE         /* for the ablations: they must break the limit itself */
  assert(fp[x] == K && st[x] == ghost[K]);       /* nothing lost, nothing invented */
  j = 0;
  do
  :: j < NS -> assert(j == x || fp[j] != K || !COMMITTED(st[j])); j++      /* a key has one committed slot */
  :: else -> break
  od
#endif
}

proctype taker(byte me; byte K; byte now) IF_ALONE {
  byte i, f, s;                                  /* the slot that the scan is at, the pair just read */
  byte x = NONE, word;                           /* the slot and the word that the scan found */
  bool several;
  bool denies;                                   /* the ghost's: the true bucket denied it at one of the looks */
  byte seen;                                     /* the reservation that I saw, or made, before this scan */
  byte made, made_x = NONE, made_n;              /* the last reservation that I made, where; how many I made */
  byte at;                                       /* as of when a fresh state is judged */
  byte scans;

#ifdef ALONE
  if
  :: atomic { me == 0 -> alone = _pid }
  :: me != 0
  fi;
#endif
#ifdef WATEREARLY
  now = MAX(now, watermark);
#endif

scan:
  atomic {
    i = 0; x = NONE; f = 0; s = 0; word = 0; several = false; denies = false;
#ifdef ALONE
    if
    :: me == 0 -> scans++; assert(scans <= 3)    /* nobody waits for what the others left behind */
    :: else
    fi
#endif
  };
look:
  if
  :: atomic { i == NS -> i = 0;
       if
       :: several -> goto scan
       :: !several && x == NONE -> goto room
       :: !several && x != NONE && seen == word -> goto commit
       :: !several && x != NONE && seen != word -> seen = word;
#ifdef FIRSTSIGHT
            goto commit
#else
            goto scan
#endif
       fi
     }
  :: atomic { i < NS && fp[i] != K -> i++; goto look }
  :: atomic { i < NS && fp[i] == K -> THEN s = st[i];
       if
       :: s == 0 -> i++; goto look               /* emptied between the two loads */
       :: COMMITTED(s) -> x = i; word = s; i = 0; s = 0; DENIES; goto found
       :: RESERVED(s) && x == NONE -> x = i; word = s; i++; s = 0; goto look
#ifdef KEEPALL
       :: RESERVED(s) && x != NONE -> i++; s = 0; goto look
#else
       :: RESERVED(s) && x != NONE -> several = true    /* clear all but the first */
#endif
       fi
     };
     atomic {
       if
       :: SAME(i, K, s) -> fp[i] = 0; st[i] = 0; REACHED(1)
       :: else
       fi;
       i++; s = 0; goto look
     }
  fi;

found:                                           /* slot x is committed, with arrival time `word` */
  if
  :: atomic { ALLOWS(word, now) ->
       if
       :: SAME_HIT(x, K, word) -> st[x] = MAX(word, now) + P; allowed(x, now)
       :: else -> REACHED(2); goto scan
       fi
     }
#ifdef NOCONFIRM
  :: atomic { !ALLOWS(word, now) -> assert(denies) }
#else
  :: atomic { !ALLOWS(word, now) && fp[x] == K -> DENIES; THEN DENIES;
       if
       :: st[x] == word -> assert(denies)        /* never less */
       :: else -> REACHED(3); goto scan
       fi
     }
  :: atomic { !ALLOWS(word, now) && fp[x] != K -> REACHED(3); goto scan }
#endif
  fi;
  if
  :: made_x != NONE && made_x != x ->            /* mine wasn't the one that was kept */
     atomic {
       if
       :: SAME(made_x, K, made) -> fp[made_x] = 0; st[made_x] = 0; REACHED(4)
       :: else
       fi
     }
  :: else
  fi;
  goto done;

commit:                                          /* the reservation `word` was alone in a whole scan after I knew it */
#if defined(NOWATER) || defined(WATEREARLY)
  at = now;
#else
  at = MAX(now, watermark);
#endif
  atomic {
    if
    :: SAME(x, K, word) ->
       st[x] = at + P;
       allowed(x, at);
#if REACH
       assert(REACH != 5 || word == made);       /* it is another's */
       assert(REACH != 6 || at == now);          /* it is as of a raised time */
       assert(REACH != 7 || !forgot[K]);         /* the key was forgotten before */
       committed[K] = true;
       assert(REACH != 8 || !committed[1] || !committed[2]);
       assert(REACH != 12 || me > 0 || word == made);       /* it is a stopped taker's */
#endif
       goto done
    :: else -> REACHED(9); seen = 0; at = 0; goto scan
    fi
  };

room:                                            /* any slot that is free: more than any rule of choice would do */
  atomic {
    if
    :: made_n == RMAX -> goto done
    :: made_n < RMAX
    fi;
    if
    :: x = 0
    :: x = 1
#if NS > 2
    :: x = 2
#endif
    fi;
    f = fp[x]; THEN s = st[x];
    if
    :: s == 0 -> goto reserve
    :: RESERVED(s) -> goto reserve               /* its maker may be dead: here at any time */
    :: COMMITTED(s) && s <= now -> skip
    :: COMMITTED(s) && s > now -> x = NONE; f = 0; s = 0; goto room
    :: COMMITTED(s) && s > now ->                /* no room: denied */
#ifdef ALONE
       j = 0;                                    /* alone, that is an answer only where no slot is free */
       do
       :: j < NS && (me != 0 || (COMMITTED(st[j]) && st[j] > now)) -> assert(me != 0 || fp[j] != K); j++
       :: j < NS && !(me != 0 || (COMMITTED(st[j]) && st[j] > now)) -> x = NONE; f = 0; s = 0; goto room
       :: j == NS -> break
       od;
#endif
       goto done
    fi
  };
#if !defined(NOPUBLISH) && !defined(PUBLISHLATE)
  watermark = MAX(watermark, s);
#endif
reserve:
  atomic {
    if
    :: SAME(x, f, s) ->
       made_n++; made = WORD; made_x = x; seen = made;
       fp[x] = K; st[x] = made;
#if REACH
       if
       :: COMMITTED(s) -> forgot[f] = true
       :: else
       fi
#endif
    :: else -> made = 0; made_x = NONE; seen = 0; REACHED(10); goto scan
    fi
  };
#ifdef PUBLISHLATE
  if
  :: atomic { COMMITTED(s) -> watermark = MAX(watermark, s) }
  :: !COMMITTED(s)
  fi;
#endif
#ifdef NORESCAN
  atomic { word = made; goto commit }
#else
  goto scan
#endif

done:
  atomic {
    i = 0; x = 0; f = 0; s = 0; word = 0; several = false; denies = false; seen = 0; made = 0; made_x = 0; made_n = 0;
    at = 0; now = 0; scans = 0;
#ifdef ALONE
    if
    :: me == 0 -> alone = 0
    :: else
    fi
#endif
  }
}

/* Forgets a key's live state on request: the true bucket is fresh again, and nothing is published. */
proctype reset(byte K; byte now) IF_ALONE {
  byte i, s;
  do
  :: atomic { i == NS -> break }
  :: atomic { i < NS && fp[i] != K -> i++ }
  :: atomic { i < NS && fp[i] == K -> THEN s = st[i];
       if
       :: COMMITTED(s) -> skip
       :: else -> i++; s = 0; goto next
       fi
     };
     atomic {
       if
       :: s <= now -> break
       :: s > now && SAME(i, K, s) -> fp[i] = 0; st[i] = 0; ghost[K] = 0; REACHED(11); break
       :: s > now && !SAME(i, K, s) -> i = 0; s = 0
       fi
     };
next: skip
  od;
  atomic { i = 0; s = 0; now = 0 }
}

/* Takers of one key are alike, so their clocks need only be tried in one order. */
inline start(me, K, K_before) {
  if
  :: K != K_before -> t = 1
  :: else
  fi;
  do
  :: t < TMAX -> t++
  :: break
  od;
  latest = MAX(latest, t);
  run taker(me, K, t)
}

init {
  byte t = 1;
  atomic {
    fp[0] = K0; st[0] = X0;
#if X0 < 32
    ghost[K0] = X0;
#endif
    start(1, K1, 0);
#if K2
    start(2, K2, K1);
#endif
#if K3
    start(3, K3, K2);
#endif
#if K4
    start(4, K4, K3);
#endif
#ifdef ALONE
    start(0, ALONE, 0);
#endif
#if R1
    t = 1;
    do
    :: t < TMAX -> t++
    :: break
    od;
    run reset(R1, t);
#endif
    t = 0
  }
}
