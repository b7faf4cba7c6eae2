'use strict';
// What an administrator can do from the status page, each asked for again first; the server decides whether it may be.

const admin = (() => {
  /**
   * @typedef {object} Action
   * @property {string} button
   * @property {string} title
   * @property {string} body
   * @property {string} yes
   * @property {string} done
   */

  /** @type {Record<string, Action>} */
  const ACTIONS = {
    rename: {
      button: 'Rename',
      title: 'Rename NAME',
      body: 'Clients see the new name at once. The id stays.',
      yes: 'Rename',
      done: 'NAME was renamed.',
    },
    pause: {
      button: 'Pause',
      title: 'Pause NAME?',
      body: 'What clients have sent it waits until it is resumed, here or by its owner. New ones are refused.',
      yes: 'Pause',
      done: 'NAME is paused.',
    },
    resume: {
      button: 'Resume',
      title: 'Resume NAME?',
      body: 'Its owner may have had a reason to pause it.',
      yes: 'Resume',
      done: 'NAME works again.',
    },
    kick: {
      button: 'Remove',
      title: 'Remove NAME?',
      body: 'It leaves at once, and what clients have on it is lost. It stays out until its owner joins again.',
      yes: 'Remove',
      done: 'NAME was removed.',
    },
    revoke: {
      button: 'Revoke',
      title: 'Revoke NAME?',
      body:
        'It leaves at once and cannot come back: it loses its secret, and the node token changes. ' +
        'Other devices stay, but whoever joins for the first time needs the new token.',
      yes: 'Revoke',
      done: 'NAME was revoked.',
    },
  };

  /**
   * Ask the administrator, then the server.
   * @param {string} token
   * @param {string} action a key of ACTIONS
   * @param {{name: string, label: string}} node
   * @returns {Promise<{said: string, tokens: Record<string, string>} | null>} null where it was not to be
   * @throws {Error} with the server's reason
   */
  async function act(token, action, node) {
    const what = ACTIONS[action];
    const name = node.label || node.name;
    /** @param {string} text */
    const filled = (text) => text.replace('NAME', () => `“${name}”`);
    const asked = { title: filled(what.title), body: what.body, yes: what.yes };
    const answer = await ui.confirm(action === 'rename' ? { ...asked, input: name } : asked);
    if (answer === null || (action === 'rename' && !answer.trim())) return null;
    const body = action === 'rename' ? { label: answer.trim() } : {};
    const told = await post(token, `admin/nodes/${encodeURIComponent(node.name)}/${action}`, body);
    return { said: filled(what.done), tokens: action === 'revoke' ? { node: told.node } : {} };
  }

  /**
   * @param {string} token
   * @returns {Promise<Record<string, string> | null>} the new tokens
   */
  async function rotate(token) {
    const title = 'Make new tokens?';
    const body =
      'The client token and the node token change at once. Who is connected stays, and devices that have joined before ' +
      'can come back; everybody else needs the new ones.';
    if ((await ui.confirm({ title, body, yes: 'Make new tokens' })) === null) return null;
    const { client, node } = await post(token, 'admin/tokens/rotate', {});
    return { client, node };
  }

  /**
   * @param {string} token
   * @param {string} route
   * @param {object} body
   * @returns {Promise<Record<string, string>>} the answer, of which only texts matter here
   */
  async function post(token, route, body) {
    const answer = await fetch(route, {
      method: 'POST',
      headers: { Authorization: `Bearer ${token}`, 'Content-Type': 'application/json' },
      body: JSON.stringify(body),
      cache: 'no-store',
    });
    const text = await answer.text();
    if (!answer.ok) throw new Error(text.trim() || `the server answered ${answer.status}`);
    if (!answer.headers.get('Content-Type')?.startsWith('application/json')) return {};
    return JSON.parse(text);
  }

  return { ACTIONS, act, rotate };
})();

if (typeof module !== 'undefined') Object.assign(module.exports, admin);
