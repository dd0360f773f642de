/* What becomes of a key that finds no room, as a model: a few slots, one group of keys, GCRA, a few takers of one
 * request each.  claim.pml is the model of everything else that a taker does.
 *
 *   spin -DP=1 -DTMAX=2 -DK1=1 -DK2=1 -DK3=2 -a share.pml
 *   cc -w -O2 -DSAFETY -DCOLLAPSE -DMEMLIM=4000 -o pan pan.c && ./pan -m100000
 *
 * README.md, beside this file, says what is modelled, what is left out and which configurations are run.
 *
 * A slot is the pair (fp, st).  st: 0 empty, 1 to 31 committed (it is the theoretical arrival time), from 32 on
 * reserved (it is the word of the reservation).  An atomic block touches shared memory once: one load, one swap or one
 * raising of a word.  All else in it is the taker's own, or the ghost's.
 *
 * All keys are of one group.  `group` is its state, 0 where it has none: a region of slots, in which it is claimed as
 * in claim.pml, comes down to that word and the number of times that it was forgotten.
 *
 * hits counts, for each key and time, the requests that were allowed as of that time and kept.  Their bucket is the one
 * that took them in the order of their times: where that refuses one, so does every other order.
 *
 * A taker that is killed is one that is never scheduled again, and one that is stopped is scheduled late.
 */
#ifndef NS
#define NS 1            /* slots */
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
#define RMAX 1          /* reservations of one taker; then it can only share */
#endif
#ifndef FMAX
#define FMAX 1          /* how often the group may be forgotten */
#endif
#ifndef K0
#define K0 3            /* the key in slot 0 at the start ... */
#endif
#ifndef X0
#define X0 0            /* ... and its arrival time (9 never expires here); 0: the slot is empty */
#endif
#ifndef H0
#define H0 0            /* when key 1 took a hit through the group, before the start; 0: it didn't */
#endif
#ifndef K1              /* the keys of the takers, 1 or 2; 0: no such taker */
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
#ifndef V1              /* 1: this taker may give back what it charged */
#define V1 0
#endif
#ifndef V2
#define V2 0
#endif
#ifndef V3
#define V3 0
#endif
#ifndef V4
#define V4 0
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
#define WORD (32 + 4 * me + made_n)     /* from 33 on */
#define HITS(k, t) hits[((k) - 1) * TMAX + (t) - 1]
#define REACHED(n) assert(REACH != n)

#ifdef TORN             /* others may run between the two loads of a pair */
#define THEN }; atomic {
#else
#define THEN
#endif

byte fp[NS], st[NS];
byte group, forgets;
byte shared_until;
byte watermark;
byte hits[2 * TMAX];
hidden byte j, n, e, h; /* the ghost's */
#if REACH
bool by_slot, by_group; /* a request of key 1 was allowed by its slot, through the group */
#endif

/* e: the arrival time of the bucket that took what key k was allowed. */
inline bucket(k) {
  e = 0; j = 1;
  do
  :: j <= TMAX -> n = HITS(k, j);
     do
     :: n > 0 ->
        assert(ALLOWS(e, j));                    /* never more */
        e = MAX(e, j) + P; n--
     :: n == 0 -> break
     od;
     j++
  :: j > TMAX -> break
  od
}

/* The ghost's look at a request that is allowed as of t; `kept` is 0 where it is going to be given back. */
inline allowed(t, kept) {
  d_step {
    assert(t <= TMAX);
    HITS(K, t) = HITS(K, t) + kept;
    bucket(K);
#ifndef ONLYMORE        /* for the ablations: they must break the limit itself */
    h = NONE; j = 0;
    do
    :: j < NS && fp[j] == K && COMMITTED(st[j]) ->
       assert(h == NONE);                        /* a key has one committed slot ... */
       assert(st[j] >= e);                       /* ... with all that it was allowed */
       h = j; j++
    :: j < NS && !(fp[j] == K && COMMITTED(st[j])) -> j++
    :: j == NS -> break
    od;
#endif
    h = 0; e = 0; j = 0; n = 0
  }
}

/* Reads the group, by a scan of several slots.  It finds the state of one moment; or none, if there was none at one
 * moment, or if the group was forgotten meanwhile: it may have come back in a slot that the scan had passed. */
inline read_group() {
  atomic { n0 = (group == 0 -> NONE : forgets) };
  atomic {
    if
    :: g = group
    :: n0 != forgets -> assert(REACH != 1 || n0 == NONE || group == 0); g = 0
    fi;
    n0 = 0
  }
}

/* A charge is kept, or given back at any later time. */
inline keep_or_not() {
  if
  :: kept = true
  :: gives -> kept = false
  fi
}

proctype taker(byte me; byte K; byte now; bool gives) {
  byte i, f, s;                                  /* the slot that the scan is at, the pair just read */
  byte x = NONE, word;                           /* the slot and the word that the scan found */
  bool several;
  byte seen;                                     /* the reservation that I saw, or made, before this scan */
  byte made, made_x = NONE, made_n;              /* the last reservation that I made, where; how many I made */
  byte at;                                       /* as of when a fresh state is judged; sharing: the stamp */
  byte g, n0;                                    /* the group as I read it, and how often it had been forgotten */
  byte to;                                       /* what I store in the group */
  bool kept;

#ifdef GROUPEARLY
  read_group();
#endif
scan:
  atomic {
    i = 0; x = NONE; f = 0; s = 0; word = 0; several = false; at = 0; n0 = 0; to = 0;
#ifndef GROUPEARLY
    g = 0
#endif
  };
look:
  if
  :: atomic { i == NS -> i = 0;
       if
       :: several -> goto scan
       :: !several && x == NONE ->
          if
          :: goto share                          /* whatever room there is */
          :: made_n < RMAX -> goto room
          fi
       :: !several && x != NONE && seen == word -> goto commit
       :: !several && x != NONE && seen != word -> seen = word; goto scan
       fi
     }
  :: atomic { i < NS && fp[i] != K -> i++; goto look }
  :: atomic { i < NS && fp[i] == K -> THEN s = st[i];
       if
       :: s == 0 -> i++; goto look
       :: COMMITTED(s) -> x = i; word = s; i = 0; s = 0; goto found
       :: RESERVED(s) && x == NONE -> x = i; word = s; i++; s = 0; goto look
       :: RESERVED(s) && x != NONE -> several = true
       fi
     };
     atomic {
       if
       :: SAME(i, K, s) -> fp[i] = 0; st[i] = 0
       :: else
       fi;
       i++; s = 0; goto look
     }
  fi;

found:                                           /* slot x is committed: decided on that alone */
  atomic {
    if
    :: ALLOWS(word, now) && SAME(x, K, word) ->
       st[x] = MAX(word, now) + P; to = st[x];
       keep_or_not();
       allowed(now, kept)
    :: ALLOWS(word, now) && !SAME(x, K, word) -> goto scan
    :: !ALLOWS(word, now) -> kept = true         /* denied; claim.pml has its second look */
    fi
  };
  if
  :: made_x != NONE && made_x != x ->
     atomic {
       if
       :: SAME(made_x, K, made) -> fp[made_x] = 0; st[made_x] = 0
       :: else
       fi
     }
  :: else
  fi;
  goto main_back;

commit:                                          /* the reservation `word` was alone in a whole scan after I knew it */
#ifdef WATERFIRST
  at = MAX(now, watermark);
#endif
#ifndef GROUPEARLY
  atomic {
    if
#ifndef NOGROUP
    :: shared_until > now -> skip
    :: shared_until <= now -> goto water         /* every group has expired by then */
#else
    :: goto water
#endif
    fi
  };
  read_group();
#endif
water:
#ifndef WATERFIRST
  at = MAX(now, watermark);
#endif
  atomic {
    if
    :: ALLOWS(g, at) -> skip
    :: !ALLOWS(g, at) -> kept = true             /* denied */
    fi;
    if
    :: SAME(x, K, word) && kept -> fp[x] = 0; st[x] = 0; REACHED(2); goto done
    :: !SAME(x, K, word) && kept -> goto done
    :: SAME(x, K, word) && !kept ->
#ifdef FROMFRESH
       st[x] = at + P;
#else
       st[x] = MAX(g, at) + P;
#endif
       to = st[x];
       keep_or_not();
       allowed(at, kept);
#if REACH
       assert(REACH != 3 || g <= at);            /* it starts from a live state of the group */
       assert(REACH != 4 || word == made);       /* it is another's reservation */
       by_slot = by_slot || (K == 1 && kept);
       assert(REACH != 5 || !by_slot || !by_group);
#endif
       goto main_back
    :: !SAME(x, K, word) && !kept -> seen = 0; goto scan
    fi
  };

main_back:                                       /* give back what I charged to slot x */
  if
  :: atomic { kept -> goto done }
  :: atomic { !kept ->
       if
       :: SAME(x, K, to) -> st[x] = to - P; REACHED(6)
       :: else
       fi;
       goto done
     }
  fi;

room:                                            /* any slot that is free: more than any rule of choice would do */
  atomic {
    if
    :: x = 0
#if NS > 1
    :: x = 1
#endif
    fi;
    f = fp[x]; THEN s = st[x];
    if
    :: s == 0 -> goto reserve
    :: RESERVED(s) -> goto reserve               /* its maker may be dead: here at any time */
    :: COMMITTED(s) && s <= now -> skip
    :: COMMITTED(s) && s > now -> x = NONE; f = 0; s = 0; goto share
    fi
  };
  watermark = MAX(watermark, s);
reserve:
  atomic {
    if
    :: SAME(x, f, s) -> made_n++; made = WORD; made_x = x; seen = made; fp[x] = K; st[x] = made
    :: else -> made = 0; made_x = NONE; seen = 0
    fi;
    goto scan
  };

share:
#ifdef NORAISE
  at = now;
#else
  at = MAX(now, watermark);                      /* the stamp */
#endif
charge:
  atomic {
    g = group; n0 = forgets;
    if
    :: g > 0 && ALLOWS(g, at) -> to = MAX(g, at) + P; goto publish
    :: g > 0 && !ALLOWS(g, at) -> goto done      /* denied */
    :: g == 0
    fi
  };
#ifdef STAMPFRESH
  to = at + P;
#elif defined(RESTAMP)
  atomic { at = MAX(at, watermark); to = at + P };
#else
  to = MAX(at, watermark) + P;
#endif
publish:
#if !defined(NOPUBLISH) && !defined(PUBLISHAFTER) && !defined(PUBLISHLAST)
  shared_until = MAX(shared_until, to);
#endif
  atomic {
    if
    :: group == g && (g > 0 || forgets == n0) ->
       group = to;
       assert(REACH != 8 || g > 0 || n0 == 0);   /* the group was forgotten before */
       assert(REACH != 9 || to <= MAX(g, at) + P);         /* it is as of a raised time */
       g = 0; n0 = 0
    :: else -> g = 0; n0 = 0; to = 0; REACHED(7); goto charge
    fi
  };
#ifdef PUBLISHAFTER
  shared_until = MAX(shared_until, to);
#endif
#ifdef MARKEARLY
  atomic {
    if
    :: watermark > at -> goto back
    :: else
    fi
  };
#endif
#ifndef NOSECOND
second:                                          /* is the key in the main region now? */
  if
  :: atomic { i == NS -> i = 0 }
  :: atomic { i < NS && fp[i] != K -> i++; goto second }
  :: atomic { i < NS && fp[i] == K -> THEN s = st[i];
       if
       :: s == 0 -> i++; goto second
#ifdef LIVEONLY
       :: COMMITTED(s) && s <= at -> s = 0; i++; goto second
       :: COMMITTED(s) && s > at -> goto back
#else
       :: COMMITTED(s) -> REACHED(10); assert(REACH != 11 || s > at); goto back
#endif
#ifdef KEEPRESERVED
       :: RESERVED(s) -> s = 0; i++; goto second
#else
       :: RESERVED(s)
#endif
       fi
     };
     atomic {
       if
       :: SAME(i, K, s) -> fp[i] = 0; st[i] = 0; REACHED(12);
#ifndef LOOKAGAIN
          i++
#else
          i = 0
#endif
       :: else -> REACHED(13);
#ifdef IGNORELOST
          i++
#elif defined(LOOKAGAIN)
          i = 0
#endif
       fi;
       s = 0; goto second
     }
  fi;
#endif
#ifdef PUBLISHLAST
  shared_until = MAX(shared_until, to);
#endif
  atomic {
#if !defined(NOMARK) && !defined(MARKEARLY)
    if
    :: watermark > at -> REACHED(14); goto back
    :: else
    fi;
#endif
    keep_or_not();
    allowed(at, kept);
#if REACH
    by_group = by_group || (K == 1 && kept);
    assert(REACH != 5 || !by_slot || !by_group); /* a key was allowed in both ways */
#endif
    if
    :: kept -> goto done
    :: !kept -> made_n = RMAX; x = 0; goto group_back
    fi
  };

back:                                            /* give the charge back and start again */
  x = NONE;
group_back:
  atomic {
    if
#ifdef ALLBACK
    :: group > 0 -> group = group - P
#else
    :: group == to -> group = to - P; assert(REACH != 15 || x != NONE); assert(REACH != 16 || x == NONE)
#endif
    :: else -> REACHED(17)                       /* somebody came: it stays charged */
    fi;
    i = 0; s = 0;
    if
    :: x == NONE -> goto scan
    :: x != NONE
    fi
  };

done:
  atomic {
    i = 0; x = 0; f = 0; s = 0; word = 0; several = false; seen = 0; made = 0; made_x = 0; made_n = 0; at = 0; g = 0;
    n0 = 0; to = 0; kept = 0; gives = 0; now = 0; K = 0; me = 0
  }
}

/* Other keys' takers forget the group once it has expired as of their clocks. */
proctype forgetter() {
  byte g, left = FMAX;
end:
  do
  :: atomic { left > 0 && group > 0 && group <= TMAX -> g = group };
#ifndef NOFORGETPUBLISH
     watermark = MAX(watermark, g);
#endif
     atomic {
       if
       :: group == g -> group = 0; forgets++; left--
       :: else
       fi;
       g = 0
     }
  od
}

/* Forgets a key's slot on request, and nothing is published; the group stays as it is. */
proctype reset(byte K) {
  byte i, s;
  do
  :: i < NS ->
     atomic {
       if
       :: fp[i] == K && COMMITTED(st[i]) -> s = st[i]
       :: !(fp[i] == K && COMMITTED(st[i])) -> i++; goto next
       fi
     };
     atomic {
       if
       :: SAME(i, K, s) -> fp[i] = 0; st[i] = 0; j = 1;
          do
          :: j <= TMAX -> HITS(K, j) = 0; j++
          :: j > TMAX -> j = 0; break
          od;
          REACHED(18); i = NS
       :: else
       fi;
       s = 0
     };
next: skip
  :: i == NS -> break
  od;
  atomic { i = 0; K = 0 }
}

/* Takers that are alike need only be tried in one order of their clocks. */
inline start(me, K, V, K_before, V_before) {
  if
  :: K != K_before || V != V_before -> t = 1
  :: else
  fi;
  do
  :: t < TMAX -> t++
  :: break
  od;
  run taker(me, K, t, V)
}

init {
  byte t = 1;
  atomic {
#if X0
    fp[0] = K0; st[0] = X0;
#if K0 == 1
    HITS(1, X0 - P) = 1;
#endif
#endif
#if H0
    HITS(1, H0) = 1; group = H0 + P; shared_until = group;
#endif
#if FMAX
    run forgetter();
#endif
    start(1, K1, V1, 0, 0);
#if K2
    start(2, K2, V2, K1, V1);
#endif
#if K3
    start(3, K3, V3, K2, V2);
#endif
#if K4
    start(4, K4, V4, K3, V3);
#endif
#if R1
    run reset(R1);
#endif
    t = 0
  }
}
