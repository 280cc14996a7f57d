/* Stands where a launcher starts `python arguments`: asks the fork server beside it for a process, and ends as that
 * ends.
 *
 * It hands over its descriptors, and which signals it blocks and ignores; the rest the server reads in /proc. Then it
 * passes on each signal that comes. Where the server is not there, or does not want this one, it becomes Python itself.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <limits.h>
#include <poll.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

enum { MOST_DESCRIPTORS = 250, SERVER_IS_LOST = 70 };
enum kind { FRESH, STARTED, EXITED, KILLED }; /* as in template.py */

struct word {
    int32_t kind, value;
};

struct handed_over {
    uint64_t blocked, ignored; /* bit n - 1: signal n */
    int32_t count, numbers[MOST_DESCRIPTORS];
};

static char folder[PATH_MAX]; /* of this program, the socket, and the name of the interpreter */
static sigset_t mask_at_start;

static int find_folder(void) {
    ssize_t length = readlink("/proc/self/exe", folder, sizeof folder - 1);
    char *slash;
    if (length < 0) return -1;
    folder[length] = 0;
    if ((slash = strrchr(folder, '/')) == NULL) return -1;
    *slash = 0;
    return 0;
}

static void become_python(char **argv) {
    static char link[PATH_MAX + 16], python[PATH_MAX];
    snprintf(link, sizeof link, "%s/interpreter", folder);
    if (readlink(link, python, sizeof python - 1) > 0) {
        sigprocmask(SIG_SETMASK, &mask_at_start, NULL);
        argv[0] = python;
        execv(python, argv);
    }
    perror("fork server's client: no Python");
    _exit(127);
}

static int connect_to_server(void) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    int length = snprintf(address.sun_path, sizeof address.sun_path, "%s/socket", folder);
    int connection = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    if (connection < 0 || length >= (int)sizeof address.sun_path) return -1;
    return connect(connection, (struct sockaddr *)&address, sizeof address) ? -1 : connection;
}

/* All descriptors but the connection's; -1 where they do not fit into a message. */
static int list_descriptors(struct handed_over *what, int connection) {
    DIR *listing = opendir("/proc/self/fd");
    struct dirent *entry;
    if (listing == NULL) return -1;
    while ((entry = readdir(listing)) != NULL) {
        int number = atoi(entry->d_name);
        if (entry->d_name[0] == '.' || number == dirfd(listing) || number == connection) continue;
        if (what->count == MOST_DESCRIPTORS) break;
        what->numbers[what->count++] = number;
    }
    closedir(listing);
    return entry == NULL ? 0 : -1;
}

static void list_signals(struct handed_over *what) {
    for (int number = 1; number <= 64; number++) {
        struct sigaction action;
        uint64_t bit = (uint64_t)1 << (number - 1);
        if (sigismember(&mask_at_start, number) == 1) what->blocked |= bit;
        if (sigaction(number, NULL, &action) == 0 && action.sa_handler == SIG_IGN) what->ignored |= bit;
    }
}

static int hand_over(int connection) {
    struct handed_over what = {0};
    char space[CMSG_SPACE(sizeof what.numbers)] = {0};
    struct iovec piece = {&what, sizeof what};
    struct msghdr message = {.msg_iov = &piece, .msg_iovlen = 1};
    list_signals(&what);
    if (list_descriptors(&what, connection)) return -1;
    if (what.count) {
        size_t bytes = what.count * sizeof what.numbers[0];
        struct cmsghdr *header = (struct cmsghdr *)space;
        message.msg_control = space;
        message.msg_controllen = CMSG_SPACE(bytes);
        *header = (struct cmsghdr){.cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS, .cmsg_len = CMSG_LEN(bytes)};
        memcpy(CMSG_DATA(header), what.numbers, bytes);
    }
    return sendmsg(connection, &message, MSG_NOSIGNAL) < 0 ? -1 : 0;
}

static int receive(int connection, struct word *word) {
    return recv(connection, word, sizeof *word, 0) == sizeof *word ? 0 : -1;
}

/* A pipe's end is where the rank ends, so none stays open here; but for stderr, to tell that the server is gone. */
static void close_all_but(int connection) {
    if (connection != 0) close(0);
    if (connection != 1) close(1);
    if (connection > 3) close_range(3, connection - 1, 0);
    close_range(connection < 3 ? 3 : connection + 1, ~0U, 0);
}

static void end_as(struct word how) {
    if (how.kind == KILLED) {
        sigset_t this_one;
        prctl(PR_SET_DUMPABLE, 0);
        signal(how.value, SIG_DFL);
        sigemptyset(&this_one);
        sigaddset(&this_one, how.value);
        raise(how.value);
        sigprocmask(SIG_UNBLOCK, &this_one, NULL);
        _exit(128 + how.value);
    }
    _exit(how.value);
}

int main(int argc, char **argv) {
    struct word word;
    sigset_t all;
    (void)argc;
    sigfillset(&all);
    sigprocmask(SIG_BLOCK, &all, &mask_at_start); /* what comes from now on is the rank's */
    if (find_folder()) return 127;
    int connection = connect_to_server();
    if (connection < 0 || hand_over(connection) || receive(connection, &word) || word.kind != STARTED)
        become_python(argv);
    close_all_but(connection);
    struct pollfd both[] = {{connection, POLLIN, 0}, {signalfd(-1, &all, SFD_CLOEXEC), POLLIN, 0}};
    for (;;) {
        struct signalfd_siginfo signal_;
        if (poll(both, 2, -1) < 0) continue;
        if (both[1].revents && read(both[1].fd, &signal_, sizeof signal_) == sizeof signal_) {
            int32_t number = signal_.ssi_signo;
            send(connection, &number, sizeof number, MSG_NOSIGNAL);
        }
        if (!both[0].revents) continue;
        if (receive(connection, &word) == 0) end_as(word);
        fputs("fork server: it has ended, and this process with it\n", stderr);
        return SERVER_IS_LOST;
    }
}
