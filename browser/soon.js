'use strict';
// Calls something once after what the browser already has for this thread, the messages that came together among it. It
// uses no timer: those of a hidden page are slow. Defines `soon`.

const soon = (() => {
  /** One thing to do, asked for any number of times before. */
  class Soon {
    /** @param {() => void} callback */
    constructor(callback) {
      this.callback = callback;
      this.asked = false;
      /** @type {MessageChannel | null} */
      this.channel = null;
    }

    ask() {
      if (this.asked) return;
      this.asked = true;
      if (!this.channel) {
        this.channel = new MessageChannel();
        this.channel.port1.onmessage = () => {
          this.asked = false;
          this.callback();
        };
      }
      this.channel.port2.postMessage(null);
    }

    close() {
      this.channel?.port1.close();
    }
  }

  return { Soon };
})();

if (typeof module !== 'undefined') Object.assign(module.exports, soon);
